// The interface of the log; src/cli/log.ts writes it. Fields are flat and named as in the API (tenant, invocation_id,
// request_id), and a secret is never a field. Events are short fixed names, to search for and to alert on.
export const LOG_LEVELS = ["debug", "info", "warn", "error"] as const;
export type LogLevel = (typeof LOG_LEVELS)[number];

export type LogFields = Readonly<Record<string, unknown>>;

export interface Log {
  debug(event: string, fields?: LogFields): void;
  info(event: string, fields?: LogFields): void;
  warn(event: string, fields?: LogFields): void;
  /** Here and at the other levels, a field that holds an Error is printed with its message, causes and stack. */
  error(event: string, fields?: LogFields): void;
}

export const silentLog: Log = { debug() {}, info() {}, warn() {}, error() {} };
