"""What is there: meshes and tori, live and failed chips and links, boards and hosts."""
