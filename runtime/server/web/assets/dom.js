/** Make elements without ever turning a string into markup: texts become text nodes, whatever they hold. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * Return an element with attributes and children. An attribute that is null or false is left out, a function is a
 * listener for the event of that name.
 * @param {string} tag
 * @param {Record<string, unknown>} attributes
 * @param {...(Node | string)} children
 */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for an element of SVG. */
export function graphic(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Return the element of the page with this id. */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`index.html has no element with the id ${id}`);
  return found;
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children);
  return node;
}
