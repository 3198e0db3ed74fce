"""Keep going: training that survives the loss of chips and takes them back."""
