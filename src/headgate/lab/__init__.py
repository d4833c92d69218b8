"""For research: experiments of the papers, benchmarks, the demonstration. Only `cli` imports it."""
