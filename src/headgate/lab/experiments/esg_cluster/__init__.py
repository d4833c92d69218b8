"""Parts of the experiment `esg`: profile sets, cluster, lower bound, results and figures."""
