/* A package that has the first phase of aclnnHcPre and not the second. */
int aclnnHcPreGetWorkspaceSize(void) { return 1; }
