"""What the methods are measured against, on the same data: Contriever and REPLUG; of readers, RA-IT and RA-DIT."""
