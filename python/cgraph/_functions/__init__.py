"""Behind ``graphed``: which calls are replays, which are captured, which run eagerly."""
