"""For research: experiments of the papers, benchmarks and the demonstration. Nothing imports it."""
