"""Behind ``report``: its words, tables and page."""
