"""What measures, reproduces and demonstrates."""
