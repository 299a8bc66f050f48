"""How benchmarks measure: command line, results, processes that take turns, scratch space. Knows no workload."""
