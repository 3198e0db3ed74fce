"""What people look at: pictures, reports, the explorer."""
