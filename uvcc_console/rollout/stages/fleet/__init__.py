"""Pods come into being, are checked, taken up again, replaced and proven gone."""
