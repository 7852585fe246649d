"""Load on a running cluster through locust, and what it must hold: see loadtests/README.md."""
