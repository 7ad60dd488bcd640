// How commands find rows on Postgres.

/**
 * Postgres finds rows so by their key alone. For a table that it takes for empty, it would read all of an index to join
 * plain equal values, and go on so when the table has grown.
 */
export const sameRow = (own: string, other: string) => `${own} between ${other} and ${other}`;

/** The request of a call, in a table of bodies by ID and kind. */
export const sameRequest = (own: string, { tenant, id }: { readonly tenant: string; readonly id: string }) =>
  `${sameRow(`(${own}.invocation_id, ${own}.kind)`, `(${id}, 'request')`)} and ${own}.tenant = ${tenant}`;
