"""Debug replays: in steps, eagerly, compared with eager, or on poisoned memory."""
