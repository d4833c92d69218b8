"""What a run leaves behind as columns, and the numbers, tables and reports made from them."""
