"""A cluster in virtual time under the live scheduler class."""
