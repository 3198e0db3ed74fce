"""What `meshmend train` trains: models, their data, and their loss."""
