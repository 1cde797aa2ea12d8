"""What an auditor is given and how it is checked: bundle, derived files, manifest, verifier."""
