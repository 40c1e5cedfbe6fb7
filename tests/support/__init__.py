"""What tests of the whole product share."""
