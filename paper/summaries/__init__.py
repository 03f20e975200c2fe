"""From finished lines to figures, tables and pictures: one module for each kind of bench."""
