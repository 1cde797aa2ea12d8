"""Plan, stages, gates, the halt ladder, resume and collection."""
