"""What a rollout will do, decided before anything is created: profiles, their schema, plans and forecasts."""
