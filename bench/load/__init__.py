"""`make bench-load`: a run of scripted rollouts on real stores and services, and what it costs them."""
