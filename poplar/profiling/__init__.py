"""How a rank is measured: one instrument per file; `poplar.profiler` plays them together."""
