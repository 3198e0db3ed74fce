"""How long an allreduce really takes: ours, Gloo's and OpenMPI's, side by side."""
