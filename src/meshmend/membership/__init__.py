"""Decides which workers train together: generations, the coordinator, and its clients."""
