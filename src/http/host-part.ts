// Loads nothing, since the gateway needs it at each start.

/** A host as it stands in a URL. */
export function hostPart(host: string): string {
  return host.includes(":") ? `[${host}]` : host;
}
