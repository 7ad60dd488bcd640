// Who calls: the tenant that owns all data the call may see, and the user within it.

export interface Caller {
  readonly tenant: string;
  readonly user: string;
  readonly scopes: ReadonlySet<string>;
}

/** Needed to receive captured bodies. */
export const READ_BODY_SCOPE = "invocations:read_body";
