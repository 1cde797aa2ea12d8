"""The worker process of a private run: admission, session, consensus, relay control, resume and the end."""
