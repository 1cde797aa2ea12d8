"""Who signs: identities, OpenSSH signatures, files of allowed signers."""
