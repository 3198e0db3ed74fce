"""A real mesh network out of Linux network namespaces."""
