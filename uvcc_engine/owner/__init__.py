"""The data owner's side: sharing inputs, opening results, replaying a run, and the table of accuracies."""
