"""Meshes and tori: live and failed chips and links, boards and hosts."""
