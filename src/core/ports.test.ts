import { expect, test } from "bun:test";
import { isBadPort } from "./host.ts";

test("ports of other protocols are told from those that HTTP servers have", () => {
  for (const port of ["22", "25", "110", "143", "465", "587", "6000", "6379", "6667", "11211"])
    expect([port, isBadPort(port)]).toEqual([port, true]);
  for (const port of ["", "80", "443", "3000", "8000", "8080", "8443", "9200", "50051"])
    expect([port, isBadPort(port)]).toEqual([port, false]);
});
