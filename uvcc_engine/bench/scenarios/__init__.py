"""Longer measurements that a benchmark quotes rows of."""
