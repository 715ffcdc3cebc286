"""Debug replays: in steps, eagerly, compared with eager, on poisoned memory."""
