"""The command ``uvcc``: one file per verb, in rooms by what the verbs are for."""
