"""Secret-shared training: job, data, layers, models, worker and the data owner's client."""
