"""`make test-chaos`: a run on real services, each of which is killed again and again while it proceeds."""
