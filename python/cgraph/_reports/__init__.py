"""Behind ``report``: its texts, tables and page."""
