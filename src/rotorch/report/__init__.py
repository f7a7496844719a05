"""`rotorch report`: directories of runs as one page. No torch."""
