"""Plans on Tenstorrent's Wormhole: tables of moves for Ethernet cores, their kernel, the host."""
