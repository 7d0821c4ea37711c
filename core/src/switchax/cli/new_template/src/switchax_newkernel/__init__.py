"""The attention operation "newkernel" for Switchax."""
