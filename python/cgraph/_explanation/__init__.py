"""Behind ``explain`` and the errors of captures: what a capture refuses or freezes."""
