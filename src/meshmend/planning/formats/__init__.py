"""Plans in formats of others: MSCCL XML, Chakra execution traces, next-hop tables, CSV."""
