"""Debug replays: in steps, compared with eager, or on poisoned memory."""
