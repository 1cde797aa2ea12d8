"""Models as people and jobs write them: named models, lists of layers, JSON, torch modules."""
