"""Who trains together: generations, the coordinator, and a worker's connection to it."""
