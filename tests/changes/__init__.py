"""Changes: ranks that come and leave, and layouts of other sizes."""
