"""What the experiments of HiPS'21 share."""
