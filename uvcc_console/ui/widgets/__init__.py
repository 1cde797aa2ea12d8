"""What panels and screens are made of: lines, tables, lists, charts, the lines at top and bottom."""
