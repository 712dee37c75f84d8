"""Programs that run inside a grader's sandbox; each stands alone."""
